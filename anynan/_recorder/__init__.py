"""Array code under a recorder: what ``anynan.track`` and ``namespace`` are made of."""
