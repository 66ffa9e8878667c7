"""`elasticdl sql`: statements that train, evaluate and use models on the tables of a database."""
