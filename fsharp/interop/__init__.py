"""Meeting other libraries: JAX and optax. Each file imports what it is for; the rest of fsharp imports none of them."""
