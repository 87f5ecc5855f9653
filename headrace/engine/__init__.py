"""What decides: the scheduler, its policies and gates, and the loop that joins it to an executor. All pure."""
