# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The agent as text, on the host: what it is asked, says, reads and earns."""
