"""Graph networks: graph servers that own the graph, elastic workers that compute, bounded asynchrony."""
