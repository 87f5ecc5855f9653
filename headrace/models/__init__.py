"""Models as data: stored weights, architectures and where to get them."""
