package probe

// Kernel is what "slicecast-agent probe kernel" prints as JSON: which programmers can work in the
// network namespace that the command runs in.
type Kernel struct {
	// Release is the kernel's release, as "uname -r" prints it.
	Release string `json:"release"`
	// Programmers has each programmer, and each variant of iptables.
	Programmers []KernelProgrammer `json:"programmers"`
}

// KernelProgrammer is what became of trying a programmer.
type KernelProgrammer struct {
	// Programmer is nftables, iptables or ipvs. Variant is nft or legacy for iptables, and empty for
	// the others.
	Programmer string `json:"programmer"`
	Variant    string `json:"variant,omitempty"`
	// Families are the IP families that can be programmed, IPv4 and IPv6. Without any, the programmer
	// cannot be used.
	Families []string `json:"families"`
	// LeftOut is why a family cannot be programmed although the programmer works for the other one,
	// by family.
	LeftOut map[string]string `json:"leftOut,omitempty"`
	// Error is why the programmer cannot be used.
	Error string `json:"error,omitempty"`
	// NoProgram means that the Error is about a program that the machine or the image lacks, so it
	// says nothing about the kernel.
	NoProgram bool `json:"noProgram,omitempty"`
	// NotPermitted means that the kernel refused the Error's operation because the process lacks a
	// privilege. Only nftables and IPVS say so apart from the text.
	NotPermitted bool `json:"notPermitted,omitempty"`
}
