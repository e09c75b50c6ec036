# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays, pure: masked means, advantages, losses, and their recipes."""
