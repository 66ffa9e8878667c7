"""`elasticdl chaos`: faults for a running job, and its recovery from them."""
