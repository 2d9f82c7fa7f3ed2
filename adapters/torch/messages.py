"""What this adapter says."""

from anynan._base.messages import Message

NO_MODULE_FOUND = Message(
    "no-module-found",
    "no module was found in {name!r}: only its inputs, its results and the optimizers it steps "
    "are watched; pass the model as an argument, or track it too",
)
COMPILED_BEFORE_TRACK = Message(
    "compiled-before-track",
    "{what}: all compiled code was dropped (torch.compiler.reset), and is compiled again, with "
    "the hooks, when it runs",
)
COMPILED_UNWATCHED = Message(
    "compiled-unwatched",
    "the layers ran in a graph without hooks once more, and are not watched there",
)
COMPILED_OUTPUT_UNREAD = Message(
    "compiled-output-unread",
    "an output inside compiled code is not watched: it is of a float8 dtype, or not on {device}, "
    "where its layer's weights were when track() was called",
)
COMPILED_STATS = Message(
    "compiled-stats",
    "stats={stats} are not measured inside compiled code, only min, max and absmax are",
)
COMPILED_LAYERS_ADDED = Message(
    "compiled-layers-added",
    "layers that were put into the model after it was compiled are not watched: track it again",
)
LAYERS_CHANGED = Message("layers-changed", "layers were put into a tracked model since: {error}")
LAYERS_UNSEEN = Message(
    "layers-unseen",
    "weights got gradients, but none of the watched layers was seen running{again}: layers inside "
    "a compiled graph, or called past the model, are not watched",
)
MODEL_CALL_UNSEEN = Message("model-call-unseen", "the model's own call was not seen{why}")
SCRIPTED = Message(
    "scripted",
    "what torch.jit scripted or traced takes no hooks, so its layers are not watched: what comes "
    "out of it is, where a layer around it or the step is tracked",
)
TRANSFORMED = Message(
    "transformed",
    "the layers of the model inside a function transform (vmap, grad, jvp and the like of "
    "torch.func) are not read: their values belong to no single call; track the step, which is "
    "read at its results, and whose second run looks inside",
)
EXPORTED = Message(
    "exported",
    "the model inside {tracer} is not watched: a check there would become a part of the graph",
)
FAKE_TENSORS = Message(
    "fake-tensors", "the model on fake tensors is not watched: they hold no values"
)
OUTPUT_UNREAD = Message(
    "output-unread",
    "the output of {path} is not watched: a {kind} whose values cannot be reduced",
)
FUSED_PATH = Message(
    "fused-path",
    "TransformerEncoderLayer has a fused path in eval mode, which PyTorch leaves while hooks are "
    "there: evaluation is slower while tracked, and may differ in the last bits",
)
SCALER_SKIPPED = Message(
    "scaler-skipped",
    "a loss scaler skipped updates although no gradient that is watched was bad: a gradient of "
    "another weight was, or one changed after it was read",
)
RANK_LOST = Message("rank-lost", "{error}; from here on each rank is judged alone")
RANKS_APART = Message(
    "ranks-apart",
    "the ranks do not act together: {why}; each is judged alone, and one that raises may leave "
    "the others waiting",
)
MODEL_GONE = Message(
    "model-gone", "the model was gone when this was read, so its last step cannot be run again"
)
GONE = Message(
    "gone", "what led to it is not known any more: the operations are noted from pass to pass"
)
REPLAY_INPUT_CHANGED = Message(
    "replay-input-changed",
    "an input of the call was changed in place since, so the replay starts from other values",
)
REPLAY_UPDATED = Message(
    "replay-updated",
    "the step had updated the weights when this was read, so the second run, and the values it "
    "shows, are with the new ones",
)
REPLAY_FROM_ONES = Message(
    "replay-from-ones",
    "the gradient that came into the model was larger than keep= allows, so the backward pass was "
    "replayed from ones instead",
)
