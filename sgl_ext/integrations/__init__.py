"""What joins sgl-ext to other systems: Ray and Kubernetes. The core imports nothing of it."""
