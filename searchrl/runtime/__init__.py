# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Infrastructure of a run: processes, meshes, checkpoints, metrics, folders."""
