"""Plan the schedule of a step before any rank exists, and choose between layouts and policies. No engine imports it."""
