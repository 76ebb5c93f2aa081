"""What MindSpore's compiler makes of a step for several devices, on a machine that has none of them."""
