"""Which tasks are leased, what is committed, what the model holds, and the cost of failures."""
