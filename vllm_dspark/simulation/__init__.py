"""What a policy would do at another load, width or machine: simulation without a model or a GPU."""
