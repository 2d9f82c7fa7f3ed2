"""Array code under a recorder: what ``anynan.track`` and ``anynan.namespace`` are made of."""
