// Package undocumented has an exported type without a comment.
package undocumented

type Undocumented struct{}
