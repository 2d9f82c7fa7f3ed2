"""TensorFlow with two devices, and every test beginning afresh."""

from importlib.util import find_spec

import pytest

if find_spec("tensorflow") is not None:
    import keras
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Two replicas need two devices, and those are counted when TensorFlow is first used.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


@pytest.fixture(autouse=True)
def fresh():
    """Begin with fresh names, and leave no class changed."""
    from anynan.tensorflow.session.seams import SEAMS

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    yield
    for session in list(SEAMS.sessions):
        session.tracker.remove()
    keras.mixed_precision.set_global_policy("float32")
