// Package weight has the least programs with parts of this module, and a test of what they link.
package weight
