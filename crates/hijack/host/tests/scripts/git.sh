# needs: git
# A repository with branches, a merge, a rebase, worktrees, a clone by local transport, packs and a check of all of it.
export GIT_AUTHOR_DATE='2020-01-01 00:00 +0000' GIT_COMMITTER_DATE='2020-01-01 00:00 +0000' GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b GIT_EDITOR=true
git config --global init.defaultBranch main
git config --global gc.auto 0
git init -q r && cd r
i=0; while [ $i -lt ${WHOLE:+10}40 ]; do echo $i > f$i; i=$((i + 1)); done
mkdir -p d/e && cp f1 d/e && git add . && git commit -qm one && git status --short | wc -l
git checkout -qb side && echo side >> f1 && git commit -qam side
git checkout -q main && echo main >> f2 && rm f3 && git commit -qam main
git merge -q -m merged side && git log --format='%H %s'
git checkout -qb other HEAD~1 && echo x > g && git add g && git commit -qm other && git rebase -q main && git log -1 --format=%H
git worktree add -q ../w side && git -C ../w log -1 --format=%s
git stash list; echo y >> f4; git stash -q; git stash pop -q; git diff --stat; git checkout -q f4
git gc -q && git fsck 2>&1 && git count-objects -v | grep packs
git clone -q file://"$PWD" ../clone && git -C ../clone rev-list --count --all
git archive HEAD | tar t | LC_ALL=C sort | tail -3; git grep -c main; git bisect start; echo $?; git bisect reset
git checkout nowhere; echo $?
cd .. && rm -rf r w clone .gitconfig
