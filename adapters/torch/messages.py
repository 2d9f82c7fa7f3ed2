"""What this adapter says."""

from anynan._base.messages import Message

NO_MODULE_FOUND = Message(
    "no-module-found",
    "no module was found in {name!r}, so only its inputs, its results and the optimizers it "
    "steps are watched: pass the model as an argument, or track it too",
)
COMPILED_BEFORE_TRACK = Message(
    "compiled-before-track",
    "{what}: anynan dropped all compiled code (torch.compiler.reset), which compiles again, "
    "with the hooks, when it next runs",
)
COMPILED_UNWATCHED = Message(
    "compiled-unwatched",
    "the layers ran again in a graph without hooks, where they are not watched",
)
COMPILED_OUTPUT_UNREAD = Message(
    "compiled-output-unread",
    "an output inside compiled code is not watched: its dtype is a float8, or it is not on "
    "{device}, where its layer's weights were when you called track()",
)
COMPILED_STATS = Message(
    "compiled-stats", "compiled code measures only min, max and absmax, not Advanced(stats={stats})"
)
COMPILED_LAYERS_ADDED = Message(
    "compiled-layers-added",
    "layers that you added to the model after it was compiled are not watched: track it again",
)
LAYERS_CHANGED = Message("layers-changed", "layers were added to a tracked model: {error}")
LAYERS_UNSEEN = Message(
    "layers-unseen",
    "weights got gradients, but no watched layer was seen running{again}: layers inside a "
    "compiled graph, or called without the model around them, are not watched",
)
MODEL_CALL_UNSEEN = Message("model-call-unseen", "anynan did not see the model's own call{why}")
WRITTEN_INTO = Message("written-into", "what it gave was written into {name}")
READ_BAD = Message(
    "read-bad",
    "the {kind} that the program read at {where} was made by {name} at {source}; no loss or "
    "gradient that was read is bad",
)
SCRIPTED = Message(
    "scripted",
    "layers that torch.jit scripted or traced take no hooks, so they are not watched: what "
    "comes out of them is, where a layer around them or the step is tracked",
)
TRANSFORMED = Message(
    "transformed",
    "the model's layers are not read inside a function transform of torch.func (vmap, grad, "
    "jvp and others), since their values belong to no single call: track the step, whose "
    "results are read and whose second run looks inside",
)
EXPORTED = Message(
    "exported",
    "the model is not watched inside {tracer}: a check there would become part of the graph",
)
FAKE_TENSORS = Message(
    "fake-tensors", "the model is not watched on fake tensors, which hold no values"
)
OUTPUT_UNREAD = Message(
    "output-unread",
    "the output of {path} is not watched: anynan cannot reduce the values of a {kind}",
)
FUSED_PATH = Message(
    "fused-path",
    "TransformerEncoderLayer does not use its fused path in eval mode while it has hooks: "
    "evaluation is slower while tracked, and may differ in the last bits",
)
SCALER_SKIPPED = Message(
    "scaler-skipped",
    "the loss scaler skipped updates although no watched gradient was bad: the gradient of "
    "another weight was, or one changed after it was read",
)
RANK_LOST = Message("rank-lost", "{error}; from now on each rank is judged alone")
RANKS_APART = Message(
    "ranks-apart",
    "the ranks do not act together: {why}; each is judged alone, and one that raises may leave "
    "the others waiting",
)
GONE = Message(
    "gone", "what led to it is no longer known: anynan keeps the operations of one pass at a time"
)
REPLAY_INPUT_CHANGED = Message(
    "replay-input-changed",
    "an input of the call was changed in place after the first run, so the second run starts "
    "from other values",
)
REPLAY_UPDATED = Message(
    "replay-updated",
    "the weights had been updated before anynan read this, so the second run, and the values "
    "it shows, use the new ones",
)
REPLAY_FROM_ONES = Message(
    "replay-from-ones",
    "the gradient that came into the model was larger than "
    "Advanced(keep=...) allows, so the second backward pass started from ones",
)
SEARCH_BEHIND = Message(
    "search-behind",
    "found by looking at the state after the step: the tracker saw nothing bad, so it was made "
    "where it does not watch",
)
SEARCH_GUESS = Message(
    "search-guess",
    "it did not happen again when the batches ran a second time from the last good state: the "
    "batch is a guess",
)
BATCH_WRITTEN = Message(
    "batch-written",
    "the step writes into its batch (batch {batch}), so what was run again started from other "
    "values",
)
STATE_BAD = Message(
    "state-bad",
    "{part}, which the optimizer keeps for this weight, is bad: the next update makes the weight "
    "bad too",
)
COMPILED_ENDS = Message(
    "compiled-ends", "what runs inside compiled code was compared only where it begins and ends"
)
GRADIENT_FAILED = Message(
    "gradient-failed", "the backward pass was not compared: it failed ({error})"
)
NO_GRADIENT = Message(
    "no-gradient", "no output needs a gradient: the backward pass was not compared"
)
