"""What happens when, as data: programs, policies, schedules, their compiler and their verifier. Reads no other folder here."""
