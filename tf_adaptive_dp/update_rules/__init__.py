"""Update rules as pure functions of tensors, shared by Keras and federated optimizers."""
