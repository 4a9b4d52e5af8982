"""When ops ran: the trace of measured steps, and the timeline of one step. Of ``stateful`` it imports ``schedule`` alone."""
