"""`sgl-ext context`: builds, lists, shows and deletes contexts."""
