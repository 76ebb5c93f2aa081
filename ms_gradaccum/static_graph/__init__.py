"""The training step that MindSpore's compiler partitions: semi-auto-parallel on Ascend and GPU."""
