"""A worker of a ParameterServer job: gradients to the parameter servers, values back."""
