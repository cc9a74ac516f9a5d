"""worker_pools."""
