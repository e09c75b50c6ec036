# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The jobs that a config can name: one `run(config, workdir)` a file."""
