"""Every part of PyTorch that is not public, by what it is used for: an upgrade looks here first."""

import torch

# The number of the backward pass that runs in this thread, -1 for none.
task = torch._C._current_graph_task_id
