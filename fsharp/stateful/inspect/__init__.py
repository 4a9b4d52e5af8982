"""Inspect a schedule: table, picture, timeline, estimate, trace. Imports :mod:`fsharp.stateful.schedule` alone."""
