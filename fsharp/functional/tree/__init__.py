"""Key paths of a user's tree, patterns of key paths, the choice of units, and names of trees. Imports no other folder."""
