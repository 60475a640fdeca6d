"""Update rules as pure functions of tensors."""
