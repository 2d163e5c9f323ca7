// Package proportion checks in tests that work takes time in proportion to its size.
package proportion
