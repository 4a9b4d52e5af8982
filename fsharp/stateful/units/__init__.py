"""One unit in a step: parameters, gradient, update, state in host memory. Has no code for events and autograd."""
