"""Is a strategy the same training as serial? Both train the same batches, tensor by tensor."""
