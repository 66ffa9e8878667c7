"""A worker of a ParameterServer job: pushes gradients to the parameter servers, and pulls values."""
