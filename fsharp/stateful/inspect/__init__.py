"""Looking at a schedule: table, picture, timeline, estimate, trace. Reads :mod:`fsharp.stateful.schedule` alone."""
