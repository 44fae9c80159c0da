#!/usr/bin/env bash
# Runs the tests that need a CUDA device, on a machine that has one: tests/run_device.sh [pytest options]
# It needs Python with numba-cuda, numpy < 2.5, mpi4py and pytest (pip install -e '.[cuda,mpi,test]').
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Open MPI refuses root and more ranks than cores unless it is told; MPICH does not read these.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS=0       # small shapes are meant here
exec python3 -m pytest -m gpu tests/device "$@"
