# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Infrastructure of runs: processes, meshes, checkpoints, metrics, folders."""
