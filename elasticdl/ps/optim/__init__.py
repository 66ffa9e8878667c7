"""Update rules, learning rate schedules and initial values, from Keras configs."""
