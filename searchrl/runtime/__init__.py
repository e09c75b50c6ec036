# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What every run stands on: processes, meshes, checkpoints, metrics, folders."""
