# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that made the models in searchrl/assets; not part of the wheel."""
