"""Eight virtual CPU devices, strict JAX, and a watch on stuck collectives, for every test."""

import os

# Interpreted kernels can keep one device busy for minutes before a collective: the CPU
# backend would take the others for stuck and abort. Tests compile more than they compute: LLVM's
# optimizations cost more than they save. XLA reads its flags once, at start-up.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
        "--xla_backend_optimization_level=0",
    )
)

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
