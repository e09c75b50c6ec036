# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that a config can name, with one `run(config, workdir)` per file."""
