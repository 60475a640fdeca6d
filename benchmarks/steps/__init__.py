"""Training steps: this library, ordinary Keras, TF Privacy, Opacus and JAX-Privacy."""
