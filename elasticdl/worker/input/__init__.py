"""From leases to minibatches, ahead of training."""
