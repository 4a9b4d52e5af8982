"""When ops ran: the trace of measured steps, and the timeline of one step. Imports :mod:`fsharp.stateful.schedule` alone."""
