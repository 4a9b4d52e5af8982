"""The verifier of schedules. It reads the records of ops, and does not depend on the compiler."""
