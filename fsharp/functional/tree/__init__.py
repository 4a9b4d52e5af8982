"""What is said of a user's tree before it is sharded: key paths and patterns, cuts into units, names. Reads no other folder."""
