# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The machine room: processes, meshes, checkpoints, metrics, a run's folder."""
