"""The schedule of a step before any rank exists, and the choice between layouts and policies by it."""
