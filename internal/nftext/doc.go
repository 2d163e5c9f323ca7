// Package nftext prints rules of nf_tables as the program nft does, from the expressions that the kernel has.
package nftext
