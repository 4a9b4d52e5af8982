"""Programs, policies and schedules as plain data, and the compiler of schedules. Imports no other folder of ``stateful``."""
