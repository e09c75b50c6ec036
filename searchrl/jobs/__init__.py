# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a config's `job` names: one `run(config, workdir)` a file."""
